"""`script/soak`: a loaded store whose clients and daemon are killed and stopped; every byte is checked."""
