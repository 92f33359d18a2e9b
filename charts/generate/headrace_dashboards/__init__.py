"""The Grafana dashboards of the chart, as code: what each panel asks, and how it is drawn."""
