"""A private federation over NVFlare (extra `nvflare`)."""
