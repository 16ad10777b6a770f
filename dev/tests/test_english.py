"""Test dev/data/english.py: what it takes from files of each kind."""
import gzip
import hashlib
import json
import re
import subprocess
import sys

from dev.tests.checks import check

PROSE = ["This is the first paragraph of a text that reads as English prose, and it is long enough "
         "to be kept.",
         "Another one says, in other words, that a paragraph with the usual little words is what "
         "we are looking for.",
         "The third of them is here so that a document of some paragraphs has the two hundred "
         "letters it needs.",
         "It is not to be found in any other file, and so it stays where it is: in the document "
         "that has it alone."]
TABLE = "the 0x01 | of 0x02 | the 0x03 | and 0x04 | the 0x05 | of 0x06 | the 0x07 | and 0x08"
LIST = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
        "sigma tau")


def test_english_text(folder):
    """The prose of each kind of file, without paragraphs that another file had."""
    docs, (one, two, three, four) = folder / "docs", PROSE
    (docs / "man" / "man1").mkdir(parents=True)
    (docs / "man" / "de").mkdir()
    for name, text in {
            "a.md": f"# Title\n\n{one}\n\n{TABLE}\n\n{LIST}\n \n{two}\n\n{two}\n",
            "b.txt": f"{one}\n\n{two}\n\n{three}\n\n{four}",  # of which two are new
            "c.txt": f"{three}\n\n{four}",  # none is new
            "d.html": f"<p>{one} One &amp; two.</p><script>{four} S</script><div>{two} "
            "<b>B</b>old</div>",
            "e.py": f"def f():\n    '''{one} F.'''\n    x = '''{two} X.'''\nclass C:\n    "
            f"'''{three} C.'''\n",
            "man/man1/f.1": f'.\\" {one}\n.TH F 1\n.SH NAME\n{one} \\fBM\\fR.\n.PP\n{two}\n.B '
            'M\\-n\n',
            "man/de/f.1": f"{one} D.\n\n{two} D.", "LICENSE.txt": f"{one} L.\n\n{two} L.",
            "g.py": "def f(:", "h.rst": f"{one} It is too short.", "i.cfg": f"{one} I.\n\n{two} I.",
            "latin.txt": f"{one} \xe9.\n\n{two} \xe9."}.items():
        (docs / name).write_bytes(text.encode("latin-1"))
    (docs / "j.txt.gz").write_bytes(gzip.compress(f"\ufeff{one} J.\n\n{two}\n{three} J.".encode()))
    (docs / "l.py").write_bytes(f"\ufeff\"\"\"{one} L.\n\n{two} L.\"\"\"\n".encode())
    (docs / "o.txt").write_bytes(f"{one} O.\r\r{two} O.\r".encode())
    (docs / "k.txt.gz").write_bytes(b"no gzip")
    whole = gzip.compress(f"{one} K.\n\n{two} K.".encode())
    for i, damaged in enumerate((whole[:40] + b"\xff\xff" + whole[42:], whole[:-20], whole[:-8] +
                                 bytes(8), whole[:12], whole[:3] + b"\xff" * 9 + whole[12:], b"")):
        (docs / f"k{i}.txt.gz").write_bytes(damaged)
    (docs / "m.py").write_text(f"\"\"\"{one} \\ud83d M.\n\n{two} \\ud83d\\ude00 M.\"\"\"\n")
    (docs / "n.py").write_text("x = " + "(" * 3000 + ")" * 3000 + "\n")
    wish = {f"{one}\n\n{two}", f"{three}\n\n{four}", f"{one} One & two.\n\n{two} Bold",
            f"{one} F.\n\n{three} C.", f"{one} M.\n\n{two} M-n", f"{one} J.\n\n{two} {three} J.",
            f"{one} L.\n\n{two} L.", f"{one} O.\n\n{two} O.",
            f"{one} \ufffd M.\n\n{two} \U0001f600 M."}

    def gather(*arguments):
        return subprocess.run([sys.executable, "-m", "dev.data.english", *arguments], cwd=folder,
                              text=True, capture_output=True)

    done = gather("docs", "--output", "1.jsonl")
    found = [json.loads(line)["text"] for line in (folder / "1.jsonl").read_text().splitlines()]
    check("english.py: its documents", set(found) == wish, set(found) ^ wish or "")
    in_order = sorted(wish, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    check("english.py: their order", found == in_order)
    line = f"1.jsonl: {len(wish)} documents of {sum(map(len, wish)):,} characters, from 21 files\n"
    check("english.py: what it says", done.stdout == line, done.stdout + done.stderr)
    gather("docs/man", "docs", "--output", "2.jsonl")
    check("english.py: the same again",
          (folder / "2.jsonl").read_bytes() == (folder / "1.jsonl").read_bytes())
    (folder / "empty").mkdir()
    for wish, name in (("none: there is no such folder",
                        "none"), ("no English prose in 0 files", "empty")):
        done = gather(name)
        ok = done.returncode == 1 and re.fullmatch(f"error: {wish}.*\n", done.stderr)
        check(f"english.py: {wish}", ok, "" if ok else done.stderr)
