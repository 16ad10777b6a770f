"""What a text may bring: a mark at its begin, and pieces that tiktoken cannot take; and the names
of its two files of tokens."""
import os

from train_gpt2 import UserError

BYTE_ORDER_MARK = "\ufeff"  # some files begin with it


def call_tiktoken(method, text, **more):
    """method(text, **more). Raises UserError if tiktoken's Rust code panics, and hides what
    that prints."""
    with open(os.devnull, "w") as hidden:  # is 2 itself if stderr is closed
        stderr = os.dup(2)
        os.dup2(hidden.fileno(), 2)
        try:
            return method(text, **more)
        except BaseException as e:  # a panic is no Exception
            if type(e).__name__ not in ("PanicException", "ValueError"):
                raise
            raise UserError(f"tiktoken failed ({e}): shorten runs of a million spaces, or update "
                            "it: pip install -r requirements.txt") from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def both(pattern):
    """The paths of the two parts."""
    return [str(pattern).format(part) for part in ("train", "val")]
