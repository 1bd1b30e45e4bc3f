# SPDX-License-Identifier: Apache-2.0
# One request per modality with curl; needs `make serve` and question.wav.
curl localhost:9000/v1/chat/completions -H 'Content-Type: application/json' \
  -d '{"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
curl -N localhost:9000/v1/chat/completions -H 'Content-Type: application/json' \
  -d '{"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": true}'
curl localhost:9000/v1/audio/speech -H 'Content-Type: application/json' -o hello.mp3 \
  -d '{"model": "chat", "voice": "heart", "input": "Hello there."}'
curl localhost:9000/v1/audio/transcriptions -F model=chat -F file=@question.wav -F response_format=text
curl localhost:9000/v1/images/generations -H 'Content-Type: application/json' -o image.json \
  -d '{"model": "image", "prompt": "a red seven", "seed": 7}'
