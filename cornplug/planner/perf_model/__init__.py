"""Performance of one replica, or of a few behind one router: times, memory, rates."""
