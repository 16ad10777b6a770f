"""Downloads from Hugging Face's hub, and other libraries of dev/requirements.txt, with errors of
one line."""
import errno
import importlib
from pathlib import Path

from train_gpt2 import UserError

AGAIN = "start the program again to go on"
# what the hub may answer: what that means, and what to do
ANSWERS = {
    401: ("does not show it without a login",
          "see its page on huggingface.co, then `hf auth login`"),
    403: ("does not give it to you", "ask for access on its page, then `hf auth login`"),
    404: ("has no such thing", "see its page on huggingface.co"),
    429: ("has had too many requests from here", f"wait some minutes, then {AGAIN}"),
}


def library(name):
    """A module of dev/requirements.txt. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        package = name.split(".")[0]
        raise UserError(f"{package} is missing ({e}): pip install {package}; or, with PyTorch and "
                        "all else that dev/ uses, pip install -r dev/requirements.txt") from None


def meaning(error):
    """(what went wrong, what to do) for an exception of huggingface_hub and those it was raised
    from."""
    chain = []
    while error and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    kinds = {type(e).__name__ for e in chain}
    status = next((e.response.status_code
                   for e in chain if getattr(e, "response", None) is not None), None)
    if status:
        what, advice = ANSWERS.get(status,
                                   ("cannot answer now", f"wait some minutes, then {AGAIN}"))
        return f"the hub {what} ({status})", advice
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE forbids to ask the hub", "unset it"
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return "the disk is full", f"make room, then {AGAIN}"
    if "RemoteProtocolError" in kinds or any("Consistency check failed" in str(e) for e in chain):
        return "the hub sent a part of it and then stopped", AGAIN
    return f"the hub could not be reached ({type(chain[-1]).__name__})", "connect to the network"


def ask(what, question, instead="give local files with --input"):
    """question(huggingface_hub). what: what is asked for. Raises UserError, with what to do
    instead."""
    hub = library("huggingface_hub")
    hub.logging.set_verbosity_error()
    try:
        return question(hub)
    except Exception as e:  # its own, and its HTTP library's
        wrong, advice = meaning(e)
        raise UserError(f"{what}: {wrong}: {advice}; or {instead}") from None


def list_files(repo, folder):
    """(commit, [[path, bytes], ...] sorted by path) of a folder of a repository. Raises
    UserError."""
    def question(hub):
        commit = hub.HfApi().repo_info(repo, repo_type="dataset").sha
        tree = hub.HfApi().list_repo_tree(repo, folder, recursive=True, revision=commit,
                                          repo_type="dataset")
        return commit, sorted([item.path, item.size] for item in tree if hasattr(item, "size"))

    return ask(f"{repo}, {folder}", question)


def download(repo, filename, revision=None, folder=None):
    """The path of a file of a repository, downloaded unless it is here already, into the folder or
    huggingface_hub's cache. Raises UserError."""
    return Path(ask(f"{repo}, {filename}", lambda hub: hub.hf_hub_download(
        repo, filename, repo_type="dataset", revision=revision, local_dir=folder)))
