"""Draw what the lanes of one warp touch at once: as text, or as an SVG.

Of global memory, a row is a sector of 32 bytes that the GPU has to move, and a cell is 4 bytes of it. Of shared memory,
a row is a turn, and a cell is a bank. A cell says which lane wants it.
"""
from pathlib import Path

from dev.cpu.traffic import BANKS, LANES, SECTOR
from prepro_tinyshakespeare import replace_file

WORD = 4
VERBS = {"load": "read", "store": "write", "atomic": "change", "copy": "copy"}


def words_of(sample, lanes=range(LANES)):
    """{word: [lanes]}: who wants which 4 bytes."""
    words = {}
    for lane in lanes:
        at = sample.at[lane]
        if at is not None:
            for word in range(at // WORD, (at + sample.bytes - 1) // WORD + 1):
                words.setdefault(word, []).append(lane)
    return words


def sectors_of(sample):
    """[(sector, its cells: 8 lists of lanes)] in the order of addresses."""
    words, size = words_of(sample), SECTOR // WORD
    return [(sector, [words.get(sector * size + i, []) for i in range(size)])
            for sector in sorted({word // size for word in words})]


def turns_of(sample, atomic=False):
    """[its cells: 32 lists of lanes] of each turn."""
    turns, first, at = [], 0, sample.at
    while first < LANES:
        together = LANES if sample.bytes <= 4 else LANES // 2 if sample.bytes <= 8 else LANES // 4
        both = range(first, first + 2 * together) if first % (2 * together) == 0 else ()
        if together < LANES and both and any(all(at[i] == at[i ^ other] or None in (at[i], at[i ^ other]) for i in both)
                                             for other in (1, 2)):
            together *= 2
        waiting = [[] for _ in range(BANKS)]
        for word, lanes in sorted(words_of(sample, range(first, first + together)).items()):
            waiting[word % BANKS] += [[lane] for lane in lanes] if atomic else [lanes]
        for turn in range(max(map(len, waiting))):
            turns.append([bank[turn] if turn < len(bank) else [] for bank in waiting])
        first += together
    return turns


def cell(lanes):
    """"." for none, "3", "3-5" or "3.." for more."""
    if not lanes:
        return "."
    if lanes == list(range(lanes[0], lanes[-1] + 1)) and len(lanes) > 1:
        return f"{lanes[0]}-{lanes[-1]}"
    return f"{lanes[0]}" + ".." * (len(lanes) > 1)


def heading(c):
    """What one request of a Count is, in a line."""
    s = c.sample
    active = sum(at is not None for at in s.at)
    who = "one lane" if active == 1 else f"{active} lanes"
    verb = VERBS[c.kind] + "s" * (active == 1)
    each = " each" * (active > 1)
    return f"line {c.line}: {who} of warp {s.warp} of block {s.block} {verb} {s.bytes} bytes of {s.array}{each}"


def as_text(c):
    """Lines that draw the sample of a Count."""
    s = c.sample
    if c.shared:
        rows = turns_of(s, c.kind == "atomic")
        titles = [f"turn {i}" for i in range(1, len(rows) + 1)]
        says = [f"{len(rows)} turn{'s' * (len(rows) > 1)}. A row is a turn, a column one of the {BANKS} banks, and the "
                "number is the lane that is served."]
    else:
        sectors = sectors_of(s)
        rows = [cells for _, cells in sectors]
        titles = [f"{s.array}[{sector * SECTOR // s.item}]" for sector, _ in sectors]
        wanted = sum(bool(lanes) for cells in rows for lanes in cells)
        says = [f"{len(rows)} sector{'s' * (len(rows) > 1)} of {SECTOR} bytes: {len(rows) * SECTOR} bytes are moved, "
                f"and {wanted * WORD} of them are wanted.",
                "A row is a sector, a column 4 bytes of it, and the number is the lane that wants them."]
    texts = [[cell(lanes) for lanes in cells] for cells in rows]
    width = max(len(text) for cells in texts for text in cells) + 1
    margin = max(map(len, titles))
    lines = ["".join(f"{text:>{width}}" for text in cells) for cells in texts]
    return [heading(c), *says, *(f"  {title:{margin}} {line}" for title, line in zip(titles, lines))]


def svg_of(c, top):
    """(elements, height, width) of a Count's picture: a row for each lane, along x the sectors or banks."""
    s, step, left, begin = c.sample, 12, 60, top + 40
    sectors = {word // 8: i for i, word in enumerate(sorted({word // 8 * 8 for word in words_of(s)}))}
    wide = 4 if len(sectors) > 8 else 12
    if c.shared:
        count, wide, apart = BANKS, 14, 0
        column = {word: word % BANKS for word in words_of(s)}
    else:
        count, apart = 8 * len(sectors), 3
        column = {word: 8 * sectors[word // 8] + word % 8 for word in words_of(s)}

    def x_of(i):
        return left + i * wide + i // 8 * apart

    cost = len(turns_of(s, c.kind == "atomic")) if c.shared else len(sectors)
    unit = "turn" if c.shared else "sector"
    says = "32 banks of 4 bytes; blue is what a lane wants" if c.shared else (
        "sectors of 32 bytes; blue is what a lane wants")
    out = [f'<text x="8" y="{top + 16}" font-weight="bold">{heading(c)}: {cost} {unit}{"s" * (cost > 1)}</text>',
           f'<text x="{left}" y="{begin - 6}" fill="#8b949e">{says}</text>']
    for i in range(0, count, 8):
        out.append(f'<rect x="{x_of(i)}" y="{begin}" width="{8 * wide}" height="{LANES * step}" fill="#8b949e" '
                   f'fill-opacity="0.2"/>')
    for lane in range(LANES):
        y = begin + lane * step
        if lane % 4 == 0:
            out.append(f'<text x="8" y="{y + 10}" fill="#6e7681">lane {lane}</text>')
        for word in words_of(s, [lane]):
            out.append(f'<rect x="{x_of(column[word])}" y="{y}" width="{wide}" height="{step - 1}" fill="#2f6fb5"/>')
    return out, begin + LANES * step + 20, x_of(count) + 20


def write_svg(path, counts):
    """Draw the samples of Counts, one below the other, into a file."""
    top, width, out = 0, 640, []
    for c in counts:
        elements, top, right = svg_of(c, top)
        width = max(width, right)
        out += elements
    text = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" '
            'font-family="sans-serif" font-size="11" fill="#6e7681">\n' + "\n".join(out) + "\n</svg>\n")
    replace_file(Path(path), [text.encode()])
