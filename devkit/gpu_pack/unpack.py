"""python3 unpack.py ENGINES.tar.xz TARGET     with Python's own xz and tar: the machine may have neither"""

import sys
import tarfile

with tarfile.open(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], filter="tar")
