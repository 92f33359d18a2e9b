"""What one request, one connection and one tenant may make this process spend.

Imports nothing of the gateway but `errors`. Leave it: `Budget`, and the checks that apply it.
"""
