# SGLang with the plugin. From the repository's root, after `pip wheel --no-deps --wheel-dir dist .`:
#   docker build -f deploy/docker/sglang.Dockerfile -t cornplug-sglang:VERSION .
ARG SGLANG=0.5.23
FROM lmsysorg/sglang:v${SGLANG}
COPY dist/*.whl /wheel/
# The extra "sglang" has the supported range, so a base image outside it fails to build.
# hadolint ignore=DL3013
RUN wheel=$(echo /wheel/cornplug-*.whl) \
    && python3 -m pip install --no-cache-dir --break-system-packages "${wheel}[sglang,remote]"
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
EXPOSE 30000
HEALTHCHECK --interval=15s --timeout=10s --start-period=1800s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=8)"]
# The model is an argument: docker run ... --model-path /models/MODEL --enable-cornplug
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
