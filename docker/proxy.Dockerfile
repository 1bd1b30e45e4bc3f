# SPDX-License-Identifier: Apache-2.0
# The OpenAI proxy: no torch, no GPU; speaks gRPC to one Triton server.
#   docker build -f docker/proxy.Dockerfile -t triton-omni-proxy .
ARG PYTHON_TAG=3.12-slim
FROM python:${PYTHON_TAG}

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

WORKDIR /source
COPY pyproject.toml README.md ./
COPY backends ./backends
COPY client ./client
RUN pip install ".[client,trace]" && rm -rf /source/build && useradd --uid 1000 --create-home proxy \
    && mkdir /key && chown 1000:1000 /key

USER 1000
WORKDIR /tmp
EXPOSE 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "triton_omni.openai", "--host", "0.0.0.0", "--port", "9000"]
# compose.yaml publishes the port on the host's loopback only; publish it elsewhere with --api-keys (docs/security.md)
CMD ["--triton", "server:8001", "--insecure"]
