"""The step block: what changes for a row from step to step, int64 [rows, BLOCK_WIDTH], one copy to the device a step."""

TOKEN = 0  # the row's input, if SOURCE is -1
SOURCE = 1  # else the place of its input among the tokens of the step before
KV_LEN = 2  # keys that the row attends, its own token included; 0: no row
MODE = 3
SEED = 4
TEMPERATURE = 5  # bits of a float64
INDEX = 6  # output index
CHOICE = 7
BLOCK_WIDTH = 8

SKIP, GREEDY, DRAW = 0, 1, 2  # of MODE
IS_FINE, NOT_FINITE, ALL_BANNED = 0, 1, 2  # of a drawn token
