# The store: one per host. From the repository's root, after `pip wheel --no-deps --wheel-dir dist .`:
#   docker build -f deploy/docker/store.Dockerfile -t cornplug-store:VERSION .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
COPY dist/*.whl /wheel/
RUN python -m venv /opt/cornplug \
    && wheel=$(echo /wheel/cornplug-*.whl) \
    && /opt/cornplug/bin/pip install --no-cache-dir "${wheel}[disk,far-object,far-valkey]"

FROM python:${PYTHON}-slim
# A number of no person of the host: store, encoder and engines are one user, and no other process is.
ARG UID=10001
RUN groupadd --gid ${UID} cornplug \
    && useradd --no-log-init --uid ${UID} --gid ${UID} --create-home cornplug \
    && install -d -m 0700 -o ${UID} -g ${UID} /run/cornplug
COPY --from=build /opt/cornplug /opt/cornplug
# The secret itself is mounted there.
# hadolint ignore=DL3064
ENV PATH=/opt/cornplug/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CORNPLUG_STORE_SOCKET=/run/cornplug/store.sock \
    CORNPLUG_STORE_SECRET_FILE=/run/secrets/cornplug
USER ${UID}:${UID}
EXPOSE 9464
# Asks the running store for its counts, as any client that has the secret.
HEALTHCHECK --interval=30s --timeout=10s --start-period=20s --retries=3 \
    CMD ["cornplug", "top", "--once", "--json"]
ENTRYPOINT ["cornplug", "serve-store"]
CMD ["--metrics", "0.0.0.0:9464"]
