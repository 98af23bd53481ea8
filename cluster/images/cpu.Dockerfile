# syntax=docker/dockerfile:1
# The cpu image of every node of a cluster, from requirements/cpu.txt. From the repository's root:
#   docker build -f cluster/images/cpu.Dockerfile -t <registry>/prism-ray-cpu:<Ray version>-py311-<build> .
FROM python:3.11.11-slim-bookworm

# gcc: Triton and DeepSpeed compile at first use. rsync, openssh: Ray's launcher moves files and starts workers with them. wget: KubeRay's health probes.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates git openssh-client procps rsync wget \
    && rm -rf /var/lib/apt/lists/*

# CPU builds of torch: the lock pins the release, this index has the build without CUDA.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu DS_ACCELERATOR=cpu VLLM_TARGET_DEVICE=cpu
WORKDIR /opt/prism-ray
COPY requirements/cpu.txt requirements/cpu.txt
COPY cluster/images/launcher.txt cluster/images/launcher.txt
# setuptools first: DeepSpeed is source only, and without build isolation nothing unpinned is fetched. Locks are complete, so nothing is resolved.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c requirements/cpu.txt setuptools \
    && DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation -r requirements/cpu.txt \
    && pip install --no-deps -r cluster/images/launcher.txt
COPY pyproject.toml README.md LICENSE ./
COPY prism_ray prism_ray
COPY kernels kernels
COPY tune_spaces tune_spaces
COPY serve_apps serve_apps
COPY jobs jobs
RUN pip install --no-deps --no-build-isolation . \
    && python -c "import torch; assert torch.version.cuda is None"

# Made here, so that mounted folders and Ray's logs belong to the user of every process.
RUN useradd --create-home --uid 1000 --shell /bin/bash ray && mkdir -p /nvme /shared /tmp/ray && chown ray:ray /nvme /shared /tmp/ray
USER ray
ENV HOME=/home/ray RAY_TRAIN_V2_ENABLED=1 RAY_USAGE_STATS_ENABLED=0
CMD ["bash"]
