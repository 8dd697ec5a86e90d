# Packing and training on a CPU:
#   docker build -t offline-packing . && docker run -v $PWD:/workspace offline-packing run pack.yaml
# Training on GPUs, with the PyTorch and flash-attn of NVIDIA's image:
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:26.09-py3 -t offline-packing:gpu .
#   docker run --gpus all --ipc=host -v /data:/data offline-packing:gpu launch sft_qwen2_vl data.path=/data/sft ...
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG EXTRAS=demo,video,logging,remote
WORKDIR /opt/offline-packing
COPY . .
RUN python -c "import torch" 2> /dev/null || pip install --no-cache-dir \
    --index-url https://download.pytorch.org/whl/cpu $(grep '^torch==' constraints.txt)
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt ".[${EXTRAS}]"
# The planner is compiled once, not once per container, where /workspace is mounted.
ENV NUMBA_CACHE_DIR=/workspace/.cache/numba
WORKDIR /workspace
ENTRYPOINT ["offline-packing"]
CMD ["--help"]
