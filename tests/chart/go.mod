module rangecache.test/chart

go 1.26.0

require (
	github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring v0.94.0 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	k8s.io/api v0.37.1 // indirect
	k8s.io/apimachinery v0.37.1 // indirect
	k8s.io/pod-security-admission v0.37.1 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
