# SPDX-License-Identifier: Apache-2.0
# Triton-Omni's server: NVIDIA's tritonserver, the engine environment beside it, the supervisor as entry point.
#   docker build -f docker/server.Dockerfile -t triton-omni-server .
# Tags before 26.07 have a deadlock in the Python backend that GPU tensors can hit; 24.10 and older cannot be used at
# all: their Python is 3.10.
ARG TRITON_TAG=26.07
FROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}-py3

# cuda: vLLM and torch for GPUs; cpu: the builds the local set-up uses
ARG ENGINE_EXTRAS=cuda,client
# passed to pip, e.g. --extra-index-url for a CPU build
ARG PIP_ARGS=

ENV TRITON_OMNI_HOME=/opt/triton-omni \
    TRITON_OMNI_ENGINE_PYTHON=/opt/triton-omni/engine/bin/python \
    TRITON_OMNI_MODELS=/models \
    HOME=/opt/triton-omni/home \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

WORKDIR /opt/triton-omni/source
COPY pyproject.toml README.md ./
COPY backends ./backends
COPY client ./client

# Triton's stubs run the container's own Python: they get this package, msgspec and OpenTelemetry, nothing that could
# fight numpy's version there. Engines, proxy and supervisor live in an environment of their own.
# NVIDIA's image has numpy 1 for its Python backend, which is kept.
# Compilers and Python's headers: vLLM's kernels are compiled at their first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install --break-system-packages ".[trace]" "numpy<2" virtualenv \
    && python3 -m virtualenv /opt/triton-omni/engine \
    && /opt/triton-omni/engine/bin/pip install ".[${ENGINE_EXTRAS}]" ${PIP_ARGS} \
    && for file in backends/pipelines/*/requirements-engine.txt; do \
        /opt/triton-omni/engine/bin/pip install --no-deps --require-hashes -r "$file" || exit 1; \
    done \
    && rm -rf build

COPY model_repository /opt/triton-omni/model_repository

# the image's own user; /models is where weights are mounted, HOME where vLLM keeps what it compiled, /key the operator's
RUN mkdir -p /models /key /opt/triton-omni/logs "$HOME" \
    && chown -R 1000:1000 /opt/triton-omni/logs /models /key "$HOME"
USER 1000
WORKDIR /tmp

EXPOSE 8000 8001 8002
# loading large weights takes minutes: ready is not expected before
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["/opt/triton-omni/engine/bin/python", "-m", "triton_omni.cli", "doctor", "--health"]
STOPSIGNAL SIGTERM
# NVIDIA's entry point first: it checks the driver and prints the image's notices
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/opt/triton-omni/engine/bin/python", "-m", "triton_omni.cli", "serve", "--host", "0.0.0.0", "--no-proxy"]
CMD ["--deploy", "/opt/triton-omni/source/backends/pipelines/chat/deploy.yaml"]
