# docker build -t laurel . && docker run --rm -v "$PWD/out:/work" laurel
# runs the demo and leaves its report in out/demo/report.html. Any command: docker run --rm laurel doctor
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --no-install-recommends --yes make \
    && rm -rf /var/lib/apt/lists/*

# For a smaller image without CUDA libraries: --build-arg TORCH='torch==2.13.0 --index-url URL', with the
# URL of the CPU builds as PyTorch's installation page gives it.
ARG TORCH=""
WORKDIR /opt/laurel
COPY . .
RUN python -m venv .venv \
    && if [ -n "$TORCH" ]; then .venv/bin/pip install --no-cache-dir $TORCH; fi \
    && PIP_NO_CACHE_DIR=1 make setup

ENV PATH="/opt/laurel/.venv/bin:$PATH"
WORKDIR /work
ENTRYPOINT ["laurel"]
CMD ["demo"]
