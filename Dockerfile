# docker build -t harness . && docker run --rm -v "$PWD:/work" -v harness-cache:/root/.cache/harness harness run model.gguf
# For an NVIDIA GPU: --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04, then docker run --gpus all.
# llama.cpp is compiled by the first run, for the CPU and the GPU that it finds; the volume keeps it.
# Tried with buildah alone, and not with CUDA: docs/reference/platforms.md#docker
ARG BASE=debian:trixie-slim
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /opt/harness && /opt/harness/bin/pip install --no-cache-dir /source && rm -rf /source
ENV PATH=/opt/harness/bin:$PATH
WORKDIR /work
ENTRYPOINT ["harness"]
