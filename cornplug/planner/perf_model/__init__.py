"""Performance model of one replica, or of several replicas behind one router: times, memory and rates."""
