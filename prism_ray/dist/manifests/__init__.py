"""The files of cluster/: values put into them, what they must hold, and what they cost an hour."""
