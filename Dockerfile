# An image of the server, for a CPU or, with `--build-arg DEVICE=cuda`, for NVIDIA GPUs. See
# docs/install.md. All packages have the versions of constraints.txt and requirements.lock.
ARG BASE=debian:12-slim

# hadolint ignore=DL3006 # BASE has a tag
FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Debian 12 gives security fixes to these packages under new versions, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/quire
WORKDIR /src
COPY constraints.txt requirements.lock ./

# cpu or cuda.
ARG DEVICE=cpu
# The address of PyTorch's index of CPU wheels, which pytorch.org/get-started names. The index that pip
# asks by default has only CUDA's wheels for x86-64.
ARG TORCH_INDEX=
# pip refuses 2.13.0+cpu where the lock asks for 2.13.0.
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
    && case "$DEVICE" in \
        cpu) wanted="torch==$version+cpu" ;; \
        cuda) wanted="torch==$version" ;; \
        *) echo "DEVICE is '$DEVICE', but must be cpu or cuda" >&2 && exit 1 ;; \
    esac \
    && sed '/^torch==/d' requirements.lock > others.lock \
    && if ! /opt/quire/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -c others.lock "$wanted"; then \
        echo "$wanted was not installed; if pip finds no such version, give the address of an index" \
            "that has it: --build-arg TORCH_INDEX=ADDRESS (pytorch.org/get-started)" >&2 && exit 1; \
    fi

COPY . .
# The last command fails if the native kernels were not built.
RUN /opt/quire/bin/pip install --no-cache-dir -c constraints.txt -c requirements.lock hatchling \
    && /opt/quire/bin/pip install --no-cache-dir -c constraints.txt -c requirements.lock \
        --no-build-isolation '.[fast,otel]' \
    && /opt/quire/bin/python -c 'from quire.kernels.cpu.library import load_library; load_library()'

# hadolint ignore=DL3006 # BASE has a tag
FROM ${BASE}
ARG DEVICE=cpu
# Triton compiles a little C code on each new GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && if [ "$DEVICE" = cuda ]; then \
        apt-get install -y --no-install-recommends gcc libc6-dev python3-dev; \
    fi \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 quire \
    && useradd --uid 10001 --gid quire --no-create-home --home-dir /models --shell /usr/sbin/nologin quire \
    && install -d -o quire -g quire -m 750 /models /cache
COPY --from=build /opt/quire /opt/quire
# Models are downloaded to /models, which is the home of the server's user. QUIRE_* stand for flags.
ENV PATH=/opt/quire/bin:$PATH \
    HOME=/models \
    HF_HOME=/models/huggingface \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_PORT=8000
USER 10001:10001
WORKDIR /models
VOLUME ["/models", "/cache"]
EXPOSE 8000
# Give another port as QUIRE_PORT, which the check reads, too.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 CMD ["python3", "-c", \
    "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"QUIRE_PORT\"]}/live')"]
ENTRYPOINT ["quire"]
CMD ["serve"]
