"""Turns errors of the hub's client into messages that say what to do.

Called by `fetching`.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import errors

from quire.errors import CheckpointError, QuireError, did_you_mean
from quire.hub.aliases import family_names
from quire.hub.model_files import shown_text

_KINDS = [kind for kind in errors.HfHubHTTPError.__mro__ if issubclass(kind, Exception)]
CLIENT_ERRORS: tuple[type[Exception], ...] = tuple(kind for kind in _KINDS if kind is not Exception)
"""The errors of the hub's client and of its HTTP library (requests or httpx, by version), and the
built-in exceptions from which they derive."""

_NAMED: tuple[type[Exception], ...] = (*CLIENT_ERRORS, ValueError)


@contextmanager
def named_failures(name: str, revision: str | None) -> Iterator[None]:
    """Turns errors of the hub's client into a CheckpointError with a readable message."""
    try:
        yield
    except QuireError:
        raise  # it has a readable message already
    except _NAMED as error:
        wanted = f"{name!r}" if revision is None else f"{name!r}, revision {revision!r},"
        raise CheckpointError(
            f"{wanted} is not a folder here, and {_why_not(name, error)}"
        ) from error


def _why_not(name: str, error: Exception) -> str:
    """A clause that says why the hub did not provide the model, and what to do.

    For an error of an unknown kind, it quotes the hub's own message."""
    token = "with HF_TOKEN=... in the environment, or after `hf auth login`"
    page = f"https://huggingface.co/{name}"
    # First, the hub refuses access, or has no such model or revision.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the hub gives it only to those who accepted its terms: accept them at {page}, and"
            f" try again {token}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the hub has no such model, or shows it only to its owners; check the id ({page}"
            f"{_without_owner(name)}), or, if it is private, try again {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub's model has no such revision; see {page}/tree/main for those that it has"
    if isinstance(error, errors.HFValidationError):
        return (
            f"can't be a hub id ({shown_text(error)}); name a folder in Hugging Face's"
            " format, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    # Second, the files can't be written.
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full ({shown_text(error)}); free some of it, or set HF_HOME to a"
            " folder on another disk"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            f"a file of its size can't be written ({shown_text(error)}), by the disk's format or by"
            " a limit (`ulimit -f`); set HF_HOME and TMPDIR to folders that take larger files"
        )
    if isinstance(error, PermissionError):
        return (
            f"the hub's files can't be written ({shown_text(error)}); set HF_HOME to a folder "
            "that may be written"
        )
    # Last, the hub can't be reached, or fails in another way.
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        reason = "" if error.__cause__ is None else f": {shown_text(error.__cause__)}"
        # A name without an owner can't be fetched elsewhere either.
        fetch = (
            "; fetch it where there is a network with `hf"
            f" download {name} --local-dir FOLDER`, and name that folder"
        )
        return (
            f"the hub can't be reached from here (no network, or HF_HUB_OFFLINE is set{reason}), "
            f"and the model is not in the cache{_without_owner(name) or fetch}"
        )
    return (
        f"can't be fetched from the hub as a model id: {shown_text(error)} -- name a folder in"
        " Hugging Face's format, or a hub id such as 'Qwen/Qwen3-0.6B' that this machine can reach"
    )


def _without_owner(name: str) -> str:
    """Advice about a name without "OWNER/"; empty for a name with an owner.

    It is the nearest name of Ollama's library, or else the form of a hub id. Few models, all of
    them old, have hub ids without an owner.
    """
    if "/" in name:
        return ""
    of_id = "; a hub id has an owner, as in 'Qwen/Qwen3-0.6B'"
    return did_you_mean(name, family_names()) or of_id
