"""Starts processes: on this machine, on a fixed list of hosts, on Ray; and the doctor."""
