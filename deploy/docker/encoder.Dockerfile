# The encoder service. From the repository's root, after `pip wheel --no-deps --wheel-dir dist .`:
#   docker build -f deploy/docker/encoder.Dockerfile -t cornplug-encoder:VERSION .
# torch comes with CUDA; for a CPU: --build-arg TORCH_INDEX_URL=INDEX_OF_CPU_WHEELS
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX_URL=
COPY dist/*.whl /wheel/
RUN python -m venv /opt/cornplug \
    && wheel=$(echo /wheel/cornplug-*.whl) \
    && if [ -n "${TORCH_INDEX_URL}" ]; then \
         /opt/cornplug/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX_URL}" "torch>=2.7" "torchvision>=0.22"; \
       fi \
    && /opt/cornplug/bin/pip install --no-cache-dir "${wheel}[encoder,remote]"

FROM python:${PYTHON}-slim
# The same number as in the store's image.
ARG UID=10001
RUN groupadd --gid ${UID} cornplug \
    && useradd --no-log-init --uid ${UID} --gid ${UID} --create-home cornplug \
    && install -d -m 0700 -o ${UID} -g ${UID} /run/cornplug
COPY --from=build /opt/cornplug /opt/cornplug
# The secret itself is mounted there.
# hadolint ignore=DL3064
ENV PATH=/opt/cornplug/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    CORNPLUG_STORE_SOCKET=/run/cornplug/store.sock \
    CORNPLUG_STORE_SECRET_FILE=/run/secrets/cornplug \
    CORNPLUG_ENCODER_SOCKET=/run/cornplug/encoder.sock
USER ${UID}:${UID}
EXPOSE 8750
# The port answers once all towers are loaded.
HEALTHCHECK --interval=15s --timeout=10s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8750/health', timeout=8)"]
# The model is an argument: docker run ... --model /models/MODEL
ENTRYPOINT ["cornplug", "encoder"]
