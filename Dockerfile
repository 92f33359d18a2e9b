# Three images from one file: docker build --target gateway|engine|operator .
# All run as user 10001 on a read-only root filesystem; only /tmp and /var/cache/headrace are written.
# Every Python package is checked against its hash in requirements/; `make release-images` takes the base by digest.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
# g++ compiles the engine's CPU kernels into the wheel; no image below has it. Without kernels the wheel
# would be pure, which the last command refuses.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/build.txt /
RUN pip install --no-cache-dir --require-hashes -r /build.txt
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . \
 && test -e /wheels/headrace-*-linux_*.whl

FROM ${PYTHON_IMAGE} AS gateway-venv
COPY requirements/gateway.txt /
RUN python -m venv /opt/headrace \
 && /opt/headrace/bin/pip install --no-cache-dir --require-hashes -r /gateway.txt
COPY --from=wheel /wheels /wheels
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps /wheels/headrace-*.whl

FROM ${PYTHON_IMAGE} AS operator-venv
COPY requirements/operator.txt /
RUN python -m venv /opt/headrace \
 && /opt/headrace/bin/pip install --no-cache-dir --require-hashes -r /operator.txt
COPY --from=wheel /wheels /wheels
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps /wheels/headrace-*.whl

FROM ${PYTHON_IMAGE} AS engine-venv
# Empty: torch of the lock, with CUDA. Else an index with torch for CPUs, as https://download.pytorch.org/whl/cpu:
# what is for GPUs alone is left out.
ARG TORCH_INDEX=
COPY requirements/engine.txt /
RUN python -m venv /opt/headrace \
 && if [ -z "${TORCH_INDEX}" ]; then \
      /opt/headrace/bin/pip install --no-cache-dir --require-hashes -r /engine.txt; \
    else \
      awk '/^[a-z]/ { gpu = /^(torch|triton|nvidia-|cuda-)/ } !gpu' /engine.txt > /cpu.txt \
      && /opt/headrace/bin/pip install --no-cache-dir --no-deps --require-hashes -r /cpu.txt \
      && /opt/headrace/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" \
           "$(grep -o '^torch==[0-9.]*' /engine.txt)"; \
    fi
COPY --from=wheel /wheels /wheels
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps /wheels/headrace-*.whl

# What an engine would compile at its first start on a GPU: Triton's launcher, for which no image below has a
# C compiler, and kernels. Engines compile it here, on a CUDA device that computes nothing (docs/decisions/0035).
FROM engine-venv AS engine-kernels
ARG TORCH_INDEX=
ARG CAPABILITIES="80 89 90"
ARG KERNELS="headrace-demo llama-8b qwen3-8b qwen3-0.6b"
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && { test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
      || apt-get install -y --no-install-recommends python3-dev; } \
 && rm -rf /var/lib/apt/lists/*
COPY tests/support/headrace_testing/null_cuda.py /support/headrace_testing/
COPY tests/support/null_cuda /support/null_cuda
ENV TRITON_CACHE_DIR=/opt/headrace/share/headrace/triton
RUN mkdir -p "${TRITON_CACHE_DIR}" \
 && if [ -z "${TORCH_INDEX}" ]; then for capability in ${CAPABILITIES}; do \
      PYTHONPATH=/support TRITON_STORE_BINARY_ONLY=1 NULL_CUDA_CAPABILITY="${capability}" \
        /opt/headrace/bin/python -m headrace_testing.null_cuda -m headrace_engine.compile_kernels ${KERNELS} \
      || exit 1; done; fi \
 && find "${TRITON_CACHE_DIR}" -name '*.source' -delete

FROM ${PYTHON_IMAGE} AS base
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.vendor="Headrace" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 headrace \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/headrace \
      --shell /usr/sbin/nologin headrace \
 && install -d -o headrace -g headrace /var/cache/headrace
# Everything that libraries like to write goes below HOME: mount a volume there for a read-only root.
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/headrace \
    HF_HOME=/var/cache/headrace/huggingface \
    XDG_CACHE_HOME=/var/cache/headrace
WORKDIR /var/cache/headrace
USER 10001:10001
STOPSIGNAL SIGTERM

FROM base AS gateway
LABEL org.opencontainers.image.title="headrace-gateway" \
      org.opencontainers.image.description="OpenAI API in front of the request queue"
COPY --from=gateway-venv /opt/headrace /opt/headrace
ENV HEADRACE_GATEWAY_HOST=0.0.0.0 \
    HEADRACE_GATEWAY_METRICS_HOST=0.0.0.0 \
    HEADRACE_GATEWAY_METRICS_PORT=9400
EXPOSE 8000 9400
ENTRYPOINT ["python", "-m", "headrace_gateway"]

FROM base AS operator
LABEL org.opencontainers.image.title="headrace-operator" \
      org.opencontainers.image.description="Deploys and scales model services"
COPY --from=operator-venv /opt/headrace /opt/headrace
ENTRYPOINT ["python", "-m", "headrace_operator"]

FROM base AS engine
LABEL org.opencontainers.image.title="headrace-engine" \
      org.opencontainers.image.description="Inference engine: continuous batching over a paged KV cache"
COPY --from=engine-venv /opt/headrace /opt/headrace
COPY --from=engine-kernels /opt/headrace/share/headrace /opt/headrace/share/headrace
ENV HEADRACE_ENGINE_METRICS_HOST=0.0.0.0 \
    HEADRACE_ENGINE_METRICS_PORT=9400 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/headrace/inductor \
    TRITON_CACHE_DIR=/var/cache/headrace/triton \
    TRITON_CACHE_MANAGER=headrace_engine.kernels.triton.shipped:ShippedFirst
EXPOSE 9400
ENTRYPOINT ["python", "-m", "headrace_engine"]
