"""The signals for the decision about replicas, from the queue, scraped engines or Prometheus.

Imports desired, spec and scaling.
"""
