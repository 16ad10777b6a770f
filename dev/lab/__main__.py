"""python -m dev.lab"""
from dev.lab.lab import main
from prepro_tinyshakespeare import run_main

run_main(main)
