# syntax=docker/dockerfile:1
# The gpu image of every node of a cluster, from requirements/gpu.txt. From the repository's root:
#   docker build -f cluster/images/gpu.Dockerfile -t <registry>/prism-ray-gpu:<Ray version>-py311-<build> .
FROM python:3.11.11-slim-bookworm

# gcc: Triton and DeepSpeed compile at first use. rsync, openssh: Ray's launcher moves files and starts workers with them. wget: KubeRay's health probes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates git openssh-client procps rsync wget \
    && rm -rf /var/lib/apt/lists/*

# CUDA comes with the wheels; the machine brings the driver through the NVIDIA container toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/prism-ray
COPY requirements/gpu.txt requirements/gpu.txt
COPY cluster/images/launcher.txt cluster/images/launcher.txt
# setuptools first: DeepSpeed is source only, and without build isolation nothing unpinned is fetched. Locks are complete, so nothing is resolved.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c requirements/gpu.txt setuptools \
    && DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation -r requirements/gpu.txt \
    && pip install --no-deps -r cluster/images/launcher.txt
COPY pyproject.toml README.md LICENSE ./
COPY prism_ray prism_ray
COPY kernels kernels
COPY tune_spaces tune_spaces
COPY serve_apps serve_apps
COPY jobs jobs
RUN pip install --no-deps --no-build-isolation . \
    && python -c "import torch; assert torch.version.cuda is not None"

# Made here, so that mounted folders and Ray's logs belong to the user of every process.
RUN useradd --create-home --uid 1000 --shell /bin/bash ray && mkdir -p /nvme /shared /tmp/ray && chown ray:ray /nvme /shared /tmp/ray
USER ray
ENV HOME=/home/ray RAY_TRAIN_V2_ENABLED=1 RAY_USAGE_STATS_ENABLED=0
CMD ["bash"]
