# vLLM with the plugin. From the repository's root, after `pip wheel --no-deps --wheel-dir dist .`:
#   docker build -f deploy/docker/vllm.Dockerfile -t cornplug-vllm:VERSION .
ARG VLLM=0.32.0
FROM vllm/vllm-openai:v${VLLM}
COPY dist/*.whl /wheel/
# The extra "vllm" has the supported range, so a base image outside it fails to build.
RUN wheel=$(echo /wheel/cornplug-*.whl) \
    && uv pip install --system --break-system-packages --no-cache "${wheel}[vllm,remote]"
# The same number as in the store's image; the base image may have given it to a user.
ARG UID=10001
RUN groupadd --non-unique --gid ${UID} cornplug \
    && useradd --no-log-init --non-unique --uid ${UID} --gid ${UID} --create-home cornplug \
    && install -d -m 0700 -o ${UID} -g ${UID} /run/cornplug
# The secret itself is mounted there.
# hadolint ignore=DL3064
ENV HOME=/home/cornplug \
    CORNPLUG_STORE_SOCKET=/run/cornplug/store.sock \
    CORNPLUG_STORE_SECRET_FILE=/run/secrets/cornplug \
    CORNPLUG_STORE_AUTOSTART=false \
    CORNPLUG_ENCODER_SOCKET=/run/cornplug/encoder.sock
USER ${UID}:${UID}
WORKDIR /home/cornplug
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=10s --start-period=1800s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
# The model is an argument: docker run ... /models/MODEL --kv-connector cornplug
ENTRYPOINT ["vllm", "serve"]
