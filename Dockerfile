# docker build -t quire .                          for NVIDIA GPUs
# docker build -t quire --build-arg TORCH=cpu .    for CPUs
# docker build -t quire-ray --build-arg EXTRA=ray . with Ray, for configs/deploy/ray
# docker run --gpus all -p 8000:8000 -v quire:/home/quire/.cache quire Qwen/Qwen3-0.6B
FROM python:3.12-slim

# Triton compiles its launchers in C, and on a CPU without kernels below the first start compiles them in C++.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 quire
WORKDIR /app

# The large dependencies have their own layer, which is rebuilt only when the pins change.
ARG TORCH=cuda
COPY constraints.txt ./
RUN torch=$(grep '^torch==' constraints.txt) \
 && if [ "$TORCH" = cpu ]; then index=https://download.pytorch.org/whl/cpu; else index=https://pypi.org/simple; fi \
 && pip install --no-cache-dir --index-url "$index" "$torch"

COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY quire quire
COPY engine engine
COPY server server
COPY benchmarks benchmarks
ARG EXTRA=
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRA:+[$EXTRA]}"
# KubeRay's probes use wget.
RUN [ "$EXTRA" != ray ] || { apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*; }
# Else the first start on a CPU compiles its kernels. Not in /app, whose copy of the sources nothing runs.
RUN cd / && python -m kernels.cpu.build
COPY configs configs

# Downloaded models and compiled kernels go to ~/.cache: mount a volume there to keep them.
RUN install -d -o quire -g quire /home/quire/.cache
USER quire
ENV HF_HOME=/home/quire/.cache/huggingface \
    TRITON_CACHE_DIR=/home/quire/.cache/triton \
    PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/app/configs/demo", "--served-model-name", "quire-demo"]
