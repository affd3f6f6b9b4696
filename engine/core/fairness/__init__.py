"""Fair order between requests and tenants: queues, arrivals, step times, deadlines."""
