"""By which calls the threads of a stuck block came to where they wait: the student's own line, not
one of a function that he only calls."""

import re
import subprocess
from pathlib import Path

HEADERS = Path(__file__).resolve().parent
WAITS = re.compile(r"threads ([-\d, .]+) wait in ([^;]+?) at line (\d+) \((0x[0-9a-f]+)\)")


def frames_of(library, pcs):
    """For each address of a library's code [(function, file, line)], innermost first, without those
    of cuda.h."""
    try:
        said = subprocess.run(
            ["addr2line", "-e", library, "-a", "-i", "-f", "-C", *pcs],
            capture_output=True,
            text=True,
        ).stdout
    except OSError:  # not installed
        return {}
    found = {}
    for pc, part in zip(pcs, re.split(r"^0x[0-9a-f]+\n", said, flags=re.M)[1:]):
        frames = re.findall(r"^(.*)\n(.*):(\d+).*$", part, re.M)
        found[pc] = [
            (function, file, int(line))
            for function, file, line in frames
            if Path(file).parent != HEADERS
        ]
    return found


def with_calls(error, library, students):
    """The message of blocks.h with the lines of a student's file: "threads 0-15 wait in warp_max at
    line 12 of my_softmax.cu, called at line 30". Threads that wait at one place become one group;
    the first in the file comes first, since from there on they are apart."""
    waits = WAITS.findall(error)
    frames = frames_of(library, sorted({pc for *_, pc in waits})) if waits else {}
    names, groups, first_line = {str(path): path.name for path in students}, {}, {}
    for threads, what, line, pc in waits:
        own = [i for i, (_, file, _) in enumerate(frames.get(pc, ())) if file in names]
        if not own:
            place = f"{what} at line {line}"
        else:
            calls, first = frames[pc], own[0]
            _, file, line = calls[first]
            if first > 0:  # a function that is not his, without its types
                name = re.sub(r"^(?:\w+ )*?(\w+)[<(].*$", r"\1", calls[first - 1][0])
                what = re.sub(r"^\w+", name, what)
            more = "".join(
                f", called at line {calls[i][2]}" for i in own[1:] if calls[i][2] != line
            )
            place = f"{what} at line {line} of {names[file]}{more}"
        groups.setdefault(place, []).append(threads)
        first_line.setdefault(place, int(line))
    if not waits:
        return error
    head, tail = (
        error[: WAITS.search(error).start()],
        error[list(WAITS.finditer(error))[-1].end() :],
    )
    return (
        head
        + "; ".join(
            f"threads {', '.join(each)} wait in {place}"
            for place, each in sorted(groups.items(), key=lambda group: first_line[group[0]])
        )
        + tail
    )
