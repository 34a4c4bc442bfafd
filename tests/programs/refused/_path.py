"""Lets the programs of this folder import the modules of the folder above."""

import os
import sys

sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
