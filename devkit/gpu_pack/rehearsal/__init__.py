"""Stand-ins with which script/rehearse-gpu tries the archive on a machine without a GPU."""
