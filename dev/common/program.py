"""How a program of dev/ begins and ends: its streams, its errors, its exit status."""
import os
import sys

from train_gpt2 import UserError


def run_main(main):
    """Run a program: main() returns the exit status. An error prints one line and exits with 1,
    Ctrl-C with 130."""
    open_streams()
    try:
        status = main()
        sys.stdout.flush()
    except (UserError, OSError) as e:
        status = f"error: {e}"
    except ModuleNotFoundError as e:
        if not f"{e.name}.".startswith("dev."):
            raise
        status = (f"error: this needs {e.name.replace('.', '/')}, which is missing beside "
                  "train_gpt2.py: restore it")
    except KeyboardInterrupt:
        leave("interrupted", 130)
    except SystemExit as e:
        status = e.code
    leave(status)


def open_streams():
    """Make stdout and stderr take any text. One that is closed, as by 2>&-, is a null device:
    otherwise the next file that is opened gets its number, and what C code prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for letters that its encoding lacks


def leave(status, failure=1):
    """Exit. A message is printed, and is the status `failure`."""
    for stream, line in ((sys.stdout, ""), (sys.stderr, f"{status}\n")):
        try:
            stream.write(line if isinstance(status, str) else "")
            stream.flush()
        except OSError:  # Python would try again, and exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or 1
    sys.exit(failure if isinstance(status, str) else status)
