"""Performance of one replica, or of a few replicas behind one router: times, memory and rates."""
