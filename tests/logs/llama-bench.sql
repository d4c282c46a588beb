CREATE TABLE IF NOT EXISTS llama_bench (
  avg_ts REAL
);
INSERT INTO llama_bench (model_type, n_threads, n_prompt, n_gen, n_depth, avg_ns, avg_ts) VALUES ('llama 7B Q4_0', '8', '512', '0', '0', '190000000', '2694.7');
INSERT INTO llama_bench (model_type, n_threads, n_prompt, n_gen, n_depth, avg_ns, avg_ts) VALUES ('llama 7B Q4_0', '8', '0', '1024', '0', '11154684095', '91.8');
