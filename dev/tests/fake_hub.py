"""A hub on this machine: as much of Hugging Face's as huggingface_hub needs to download datasets
and models."""
import contextlib
import http.server
import json
import os
import re
import tempfile
import threading
from pathlib import Path
from unittest import mock


class Hub(http.server.BaseHTTPRequestHandler):
    """repos: {name: {commit: {path: bytes}}}, the newest commit last. trouble: {name: what goes
    wrong}, a status that each request for it gets, or another word of do_GET."""
    repos, trouble, asked = {}, {}, []

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self):
        path = self.path.split("?")[0].replace("%2F", "/")
        self.asked.append((self.command, path))
        if re.match("(/api/models)?/gpt2/", path):  # a name without an owner
            return self.answer(307,
                               Location=self.path.replace("/gpt2/", "/openai-community/gpt2/", 1))
        repo, action, commit, name = re.fullmatch(
            "(?:/api)?(?:/datasets|/models)?/([^/]+/[^/]+)"
            "(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path
        ).groups()
        trouble = self.trouble.get(repo, "")
        if trouble.isdigit() or action == "resolve" and trouble in ("500 for a file",
                                                                    "403 for a file"):
            codes = {"404": "RepoNotFound", "403 for a file": "GatedRepo"}
            return self.answer(int(trouble[:3]),
                               **({"X_Error_Code": codes[trouble]} if trouble in codes else {}))
        commits = self.repos[repo]
        commit = commit if commit in commits else list(commits)[-1]
        files = commits[commit]
        if action != "resolve":
            found = [{"type": "directory", "path": f"{name}/deeper", "oid": "0"}, *(
                {"type": "file", "path": file, "size": len(content), "oid": "0"}
                for file, content in reversed(files.items()) if file.startswith(name or ""))]
            if action != "tree":
                found = {"id": repo, "sha": commit,
                         "siblings": [{"rfilename": file} for file in files],
                         "private": False, "downloads": 0, "tags": []}
            return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        if name not in files or trouble == "no file":
            return self.answer(404, X_Error_Code="EntryNotFound")
        content, headers = files[name], {"ETag": f'"{commit}-{name.replace("/", "-")}"',
                                         "X_Repo_Commit": commit}
        half = content[: len(content) // 2]
        if trouble == "half" and self.command == "GET":  # and says that this is all
            self.answer(200, half, **headers)
        elif trouble == "stops" or trouble == "stumbles" and len(downloaded()) == 1:
            self.answer(200, half, len(content), **headers)
        else:
            self.answer(200, content, **headers)

    do_HEAD = do_GET


@contextlib.contextmanager
def a_hub():
    """Serve a hub, which huggingface_hub asks meanwhile, in this process and its children, with an
    empty cache."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {
            "HF_ENDPOINT": address, "HF_HOME": cache, "HF_TOKEN": "", "HF_HUB_OFFLINE": "0",
            "no_proxy": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1"}), mock.patch.multiple(
                "huggingface_hub.constants", ENDPOINT=address, HF_HUB_OFFLINE=False,
                HF_HUB_CACHE=f"{cache}/hub", HUGGINGFACE_CO_URL_TEMPLATE=address +
                "/{repo_id}/resolve/{revision}/{filename}", HF_HUB_DISABLE_PROGRESS_BARS=True):
        yield Path(cache)
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def hub_set(**settings):
    """Other constants of huggingface_hub, such as HF_HUB_OFFLINE; and no pause before a second
    try."""
    with mock.patch("time.sleep", lambda seconds: None), mock.patch.multiple(
        "huggingface_hub.constants", **settings):
        yield


def serve(repos, trouble=()):
    """From now on the hub has these repositories, and this trouble."""
    Hub.repos, Hub.trouble = repos, dict(trouble)
    Hub.asked.clear()


def downloaded():
    """The files that the hub has sent."""
    return [path for method, path in Hub.asked if method == "GET" and "/resolve/" in path]
