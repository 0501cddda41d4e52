"""Alerts: sends what needs attention to Slack, by mail or to a webhook, when it begins and ends."""
