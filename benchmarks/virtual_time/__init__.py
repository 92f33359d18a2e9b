"""The engine's own scheduler in virtual time: real decisions, steps only cost time on paper."""
