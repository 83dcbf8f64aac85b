"""The same model in another library: probes that run each library by itself, and the page that their answers make."""
