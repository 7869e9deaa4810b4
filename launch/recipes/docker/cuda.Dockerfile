# NVIDIA GPUs; written, and not built yet (docs/cuda.md). From the checkout's root:
#   docker build -f launch/recipes/docker/cuda.Dockerfile -t sgl-esft:cuda .
FROM python:3.11-bookworm
# nvcc: SGLang compiles some of its kernels for the GPU that it finds.
COPY --from=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 /usr/local/cuda-13.0 /usr/local/cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --home-dir /var/lib/sgl-esft --uid 10001 sgl-esft
RUN python -m venv /opt/sgl-esft
ENV PATH=/opt/sgl-esft/bin:/usr/local/cuda/bin:$PATH CUDA_HOME=/usr/local/cuda
# What the NVIDIA container toolkit brings in from the host: the driver, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /src
COPY requirements/ requirements/
RUN pip install --no-cache-dir -r requirements/cuda.txt -r requirements/build.txt
COPY csrc/ csrc/
RUN pip install --no-cache-dir --no-deps --no-build-isolation ./csrc
COPY pyproject.toml setup.py LICENSE ./
COPY sgl_esft/ sgl_esft/
COPY sgl_elastic/ sgl_elastic/
COPY kernels/ kernels/
COPY launch/ launch/
RUN pip install --no-cache-dir --no-deps .
USER 10001
WORKDIR /var/lib/sgl-esft
EXPOSE 30000
ENTRYPOINT ["tini", "--", "python", "-m", "sgl_esft.launch_server"]
CMD ["--host", "0.0.0.0", "--admin-key-env", "ADMIN_KEY"]
