"""Downloading a model's files from a Hugging Face hub; resume, progress and access tokens are the hub library's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvferry.engine.errors import FetchFailed, ModelNotFound
from kvferry.engine.files.room import storage_fault

# Weights, shapes, tokenizers and templates. Not fetched: pickled weights, which run code when read, and other
# frameworks' formats.
MODEL_FILES: Final = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "*.txt")


def download_snapshot(name: str, revision: str | None, include: str | None, cache: Path) -> Path:
    """The folder that holds one commit of a hub model; its name is the commit.

    Raises ModelNotFound when the hub knows no such model or revision, FetchFailed when it cannot be reached or refuses.
    """
    # Imported here: the library takes half a second, and only a fetch needs it.
    from huggingface_hub import errors, snapshot_download

    patterns = [include, "*.json", "*.jinja"] if include else list(MODEL_FILES)
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise FetchFailed(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        what = f"{name} at revision {revision!r}" if revision else name
        raise ModelNotFound(f"the hub knows no model {what}; check the spelling, or log in if it is private") from error
    except (errors.HFValidationError, errors.HfHubHTTPError) as error:
        raise FetchFailed(f"the hub refused {name}: {_first_line(error)}") from error
    except (OSError, errors.IncompleteSnapshotError) as error:
        fault = storage_fault(cache, error) if isinstance(error, OSError) else None
        if fault is not None:
            raise FetchFailed(f"{name} could not be fetched: {fault}. What came so far is kept") from error
        raise FetchFailed(
            f"{name} could not be fetched, the hub cannot be reached ({_first_line(error)}). What came so far is kept: "
            "run the same command again when the network is back. Without a network, copy the model's folder or GGUF "
            "file here and name its path"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
