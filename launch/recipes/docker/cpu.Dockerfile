# The demo, or a small model, on a CPU. From the checkout's root:
#   docker build -f launch/recipes/docker/cpu.Dockerfile -t sgl-esft:cpu .
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/sgl-esft
ENV PATH=/opt/sgl-esft/bin:$PATH
WORKDIR /src
COPY requirements/ requirements/
# --no-deps: what these packages ask for themselves are gigabytes of CUDA (requirements/README.md).
RUN pip install --no-cache-dir --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
    -r requirements/torch-cpu.txt -r requirements/engine.txt -r requirements/cpu.txt \
    -r requirements/build.txt
COPY csrc/ csrc/
RUN pip install --no-cache-dir --no-deps --no-build-isolation ./csrc
COPY pyproject.toml setup.py LICENSE ./
COPY sgl_esft/ sgl_esft/
COPY sgl_elastic/ sgl_elastic/
COPY kernels/ kernels/
COPY launch/ launch/
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm
# tini: a process 1 that passes signals on before the server listens for them, and reaps its children.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /var/lib/sgl-esft --uid 10001 sgl-esft
COPY --from=build /opt/sgl-esft /opt/sgl-esft
ENV PATH=/opt/sgl-esft/bin:$PATH
USER 10001
WORKDIR /var/lib/sgl-esft
EXPOSE 30000
ENTRYPOINT ["tini", "--", "python", "-m", "sgl_esft.launch_server"]
# Any host but 127.0.0.1 needs keys: without ADMIN_KEY in its environment it does not start.
CMD ["--host", "0.0.0.0", "--admin-key-env", "ADMIN_KEY"]
