"""What one replica, or a few behind one router, can do: times, memory, rates."""
