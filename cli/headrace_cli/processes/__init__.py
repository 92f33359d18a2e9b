"""Child processes and their logs: started, restarted, given up, ended with their parent.

Imports errors.
"""
