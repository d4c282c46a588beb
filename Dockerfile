# docker build -t harness . && docker run --rm -v "$PWD:/work" -v harness-cache:/home/harness/.cache/harness harness run model.gguf
# It runs as user 1000, to whom "$PWD" must belong; else with --user 0 -e HARNESS_CACHE=/cache, and the volume there.
# For an NVIDIA GPU: --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04, then docker run --gpus all.
# llama.cpp is compiled by the first run, for the CPU and the GPU that it finds; the volume keeps it.
# Tried with buildah alone, and not with CUDA: docs/reference/platforms.md#docker
ARG BASE=debian:trixie-slim
FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /opt/harness \
 && /opt/harness/bin/pip install --no-cache-dir --require-hashes --requirement /source/requirements/run.txt \
 && /opt/harness/bin/pip install --no-cache-dir --no-deps --no-build-isolation /source \
 && rm -rf /source
RUN useradd --uid 1000 --non-unique --create-home harness && install -d -o harness -m 700 /home/harness/.cache/harness && chown harness /home/harness/.cache
USER harness
ENV PATH=/opt/harness/bin:$PATH
WORKDIR /work
ENTRYPOINT ["harness"]
