"""python -m dev.lab"""
from dev.lab.lab import main
from prepro_tinyshakespeare import run

run(main)
