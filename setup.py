"""Package metadata. Tool settings live in pyproject.toml, tested versions in constraints.txt."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

CORE = [
    "braceexpand>=0.1.7",  # names of shards, as Energon expands them
    "click>=8.1",
    "jinja2>=3.1",
    "numba>=0.61",
    "numpy>=1.26",
    "orjson>=3.10",
    "packaging>=24.0",
    "pillow>=11.2",
    "pyarrow>=21.0",
    "pydantic>=2.12",
    "pyyaml>=6.0",
    "scipy>=1.13",
    "tiktoken>=0.8",
    "tqdm>=4.66",
    "xxhash>=3.4",
]
#: The code itself refuses others than these.
VERSIONS = run_path("task_encoders/versions.py")
TRAIN = [
    *(name + accepted for name, accepted in VERSIONS["SUPPORTED"].items()),
    "safetensors>=0.5",
    "torch>=2.11",
]
LOGGING = ["tensorboard>=2.16", "wandb>=0.19"]
TRAINER = [
    "accelerate>=1.3",  # transformers' Trainer needs it
    "peft>=0.17",  # model.lora
]
BUILTIN = ["dashscope>=1.20"]  # carries Qwen's vocabulary: `processor: builtin` needs no hub
VIDEO = ["av>=18"]  # PyAV, whose wheels hold FFmpeg
REMOTE = [  # sources and outputs that are not on a local disk; and s3fs, gcsfs, ...
    "fsspec>=2024.6",
    "universal_pathlib>=0.3",
]
NEVA = ["sentencepiece>=0.2", "protobuf>=5"]  # examples/neva: tokenizers in a .model
DOCS = ["furo", "myst-nb>=1.1", "sphinx>=8", "sphinx-click>=6", "sphinx-copybutton>=0.5"]
TEST = [
    *TRAIN,
    *TRAINER,
    *BUILTIN,
    *LOGGING,
    *VIDEO,
    "binpacking==1.5",  # to_constant_volume must give the packs of this version
    "hypothesis>=6.100",
    "ipykernel>=6.29",  # runs the notebook
    "matplotlib>=3.8",  # the plots of tools/
    "moto[s3,server]>=5.1",  # a server with the interface of S3
    "mypy>=1.13",
    "nbclient>=0.10",
    "pytest>=8.4",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "ray>=2.55",
    "ruff>=0.9",
    *REMOTE,
    "s3fs>=2024.6",
    *NEVA,
    "torchdata>=0.11",  # StatefulDataLoader, which saves what packs while training
    "webdataset>=1.0",
]

setup(
    name="offline-packing",
    version=VERSIONS["VERSION"],
    description="Offline sample packing for vision-language training on Megatron and Energon",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="sample packing, sequence packing, vision-language, megatron, energon, qwen2-vl",
    python_requires=">=3.11",
    packages=find_packages(include=["offline_packing*", "task_encoders*", "launch*"]),
    package_data={
        "offline_packing": ["py.typed", "report/templates/*.html"],
        "task_encoders": ["py.typed"],
        "launch": ["py.typed", "*.sh", "*.sbatch", "*.yaml"],
    },
    install_requires=CORE,
    extras_require={
        "train": TRAIN,
        "builtin": BUILTIN,
        "demo": [*TRAIN, *BUILTIN],
        "test": TEST,
        "docs": [*TEST, *DOCS],  # the API's reference imports what it documents
        "video": VIDEO,
        "logging": LOGGING,  # metrics.tensorboard, metrics.wandb, and others' trackers
        "trainer": [*TRAIN, *TRAINER],
        "remote": REMOTE,
        "neva": [*TRAIN, *NEVA],
        "ray": ["ray>=2.55"],
        "gpu": [*TRAIN, "flash-attn>=2.7"],
    },
    entry_points={"console_scripts": ["offline-packing = offline_packing.cli.main:main"]},
)
