"""Chat templates that come with adapters: rendered in processes of their own, within bounds."""
