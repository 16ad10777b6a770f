"""What all tests share."""
import os
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOP), os.environ.get("PYTHONPATH"))))  # of their programs
