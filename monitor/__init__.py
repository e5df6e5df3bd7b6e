"""The daemon, one per node: samples the machine, receives the jobs' records, and serves both to Prometheus.

In come kernel files, answers of the driver and frames of jobs; out go metrics, pages, recordings, and signals for the
jobs.  Start with `daemon`, which builds all parts; `service` is the process around it.

    collectors/, gpu/   one module for each source of numbers
    sampling/           the tick, and glances between ticks within the CPU budget
    worker_pool         the threads that collectors and GPUs share while their calls return
    jobs/               the current state of the host and the jobs, bounded; energy per step; late ranks
    ingest/             the hooks' socket: frames, permissions, commands to jobs
    export/             metrics for Prometheus and OTLP
    http/               the port: pages, status document, event stream, TLS and passwords
    recorder/           the flight recorder
    service, reload, systemd                signals, changed files, readiness, a socket that systemd opened
    catalog_sample, histogram               samples that parts of the daemon make; counts of durations
    watched_threads, fault_containment      threads restart; a bug loses one job, collector or step of a tick
    fair_share, heap_trimming               bounds that users share; memory that does not grow
    wakeable_selector                       how the socket server, the web server and the event stream wait

It sets nothing on any device, starts no program, and a scrape never waits for a driver.
"""
